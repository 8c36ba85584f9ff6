"""DaCe's view of a graph: conversion to an SDFG of library nodes and back, control-flow regions, transformations."""
