"""Answers questions about traces: about one parameter, about two programs, and as a file for Perfetto."""
