"""From files of rows to micro-batches: formats, templates, packing, loaders."""
