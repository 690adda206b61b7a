"""From paths and rules to a Report."""
