"""One HTML file that shows a step: its time, memory, collectives and lines, linked to each other.

Python computes what ``page.js`` draws. Opening the file fetches nothing.
"""
