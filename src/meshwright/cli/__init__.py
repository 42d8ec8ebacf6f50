"""The command line. A verb's module is loaded when the verb is used."""
