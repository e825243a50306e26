"""One description of nested data: keys, dtypes, shapes, and plain values as JSON. Nothing here imports torch."""
