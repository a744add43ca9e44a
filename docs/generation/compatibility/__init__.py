"""The compatibility matrix: real architectures in tiny sizes, and what the library does with each of them."""
