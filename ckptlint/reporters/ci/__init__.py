"""Formats that other programs show: annotations, code quality, test reports."""
