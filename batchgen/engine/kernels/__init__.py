"""Kernels for the CPU, in C++: compiled on this machine for its processor, once, and kept. Without a compiler plain torch runs.

`build` compiles and loads the library; `base` tells its functions' types to Python; what calls them lies beside what it speeds up.
"""
