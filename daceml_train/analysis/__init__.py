"""What is known of a graph without changing it: aliases, liveness, sizes, traffic, validity, and its meaning in
NumPy.
"""
