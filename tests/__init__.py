"""The tests of slipstream; a regular package, because some distributions install a package of this name."""
