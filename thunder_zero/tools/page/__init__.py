"""One HTML file that shows a step: its lanes of time, its memory, its collectives and its lines, linked to each other.

What is drawn is computed here; ``page.js`` draws it. Nothing is fetched when the file is opened.
"""
