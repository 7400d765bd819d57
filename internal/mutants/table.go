package main

// mutants are the faults that the promises of docs/design.md forbid.
var mutants = []mutant{}
