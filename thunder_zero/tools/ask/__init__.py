"""Answers questions about traces: about one parameter, about two programs; a file for Perfetto."""
