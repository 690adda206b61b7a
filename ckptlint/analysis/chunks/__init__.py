"""Faults in the chunks of a tensor and their checksums, who should have saved missing parts, and files of two saves."""
