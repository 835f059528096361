"""How a module becomes a sharded model: transform, dynamo, plugins, and what is refused."""
