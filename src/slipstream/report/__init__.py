"""A run folder as one page: learning curves, flights, evaluations, where time went, what storage saved.

It reads files only, never live objects; the page needs nothing but a browser.
"""
