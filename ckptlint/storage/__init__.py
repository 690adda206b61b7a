"""Folders and files, local or behind a URL; nothing here knows a format."""
