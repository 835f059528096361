"""One HTML file that shows a step: its time, memory, collectives and lines, linked to each other.

Python computes the data, and ``page.js`` draws it. The file needs no network.
"""
