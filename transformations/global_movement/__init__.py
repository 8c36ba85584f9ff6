"""The global level: fewer bytes over the whole step. (`global` is a Python keyword.)"""
