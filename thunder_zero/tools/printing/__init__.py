"""Fits text into a width, and shows the progress of long work. Without Thunder."""
