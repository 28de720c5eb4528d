"""One module per operator: its functional form, its gradient and its shapes for tracing."""
