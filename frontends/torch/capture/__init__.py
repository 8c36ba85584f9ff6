"""From a module's call to an operator graph: Dynamo's graph, the pre-pass, the trace."""
