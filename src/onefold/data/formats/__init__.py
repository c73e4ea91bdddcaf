"""Readers of the file formats in which image sets are published; files are untrusted and read within bounds."""
