"""Recorded datasets that do not fit into memory: cameras, joints and actions from HDF5 files, read while training.

`schema` recognises a file by its content, `recordings` loads its numbers and notes where its frames are, `frames` reads
them, and `buffer` and `sequences` are what training code meets. `cache` and `ingest` keep frames that are resized
already; `repack` rewrites files that cannot be read in parallel.
"""
