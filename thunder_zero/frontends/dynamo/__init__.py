"""The other front end: dynamo captures graphs of a module, and Thunder compiles each of them."""
