"""The live page of `meshwright watch`: reads run directories and serves them. Imports no torch."""
