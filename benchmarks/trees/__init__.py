"""Models that call themselves over trees and DAGs, beside PyTorch and level batching by hand."""
