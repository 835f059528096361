"""One HTML file that shows a step: time, memory, collectives, lines. ``page.js`` draws the data."""
