"""Folders for Hugging Face's ``from_pretrained``: models, and peft's adapters alone."""
