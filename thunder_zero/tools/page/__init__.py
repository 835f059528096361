"""One HTML file that shows a step: its time, memory, collectives and lines, linked to each other.

What is drawn is computed here; ``page.js`` draws it. Nothing is fetched when the file is opened.
"""
