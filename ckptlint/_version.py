"""The version, apart from the package itself: whoever writes it into a report need not import the public API."""

__version__ = "0.1.0"
