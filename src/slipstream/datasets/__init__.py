"""Recorded datasets that do not fit into memory: cameras, joints and actions from HDF5 files, read while training.

`describe` recognises a file by its contents, `recordings` loads its numbers and notes where its frames are, and
`frames` reads them. `transitions`, `buffer` and `sequences` are what training code uses. `ingest` stores resized
frames, and `cached` reads them.
"""
