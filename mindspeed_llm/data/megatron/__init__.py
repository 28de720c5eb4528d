"""Tokenised corpora as Megatron-LM stores, orders and cuts them."""
