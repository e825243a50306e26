"""Files that are whole or absent, checked on every read, and written in the background."""
