"""``tz.tools.fit``: the cheapest policy whose step fits into memory."""
