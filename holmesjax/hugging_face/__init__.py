"""Folders of Hugging Face's format: their tensors, settings and files. No JAX."""
