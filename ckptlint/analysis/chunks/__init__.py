"""What is wrong with the chunks of a tensor, who should have saved what is missing, and files of two saves."""
