"""A user's own `nn.Module` or a Hugging Face model outside our families: the same mesh, reducer and step.

fit          a module, a dataset and a loss handed to the trainer
own_loop     `prepare`: a training loop of the user's own on any number of ranks
build        from a module to what a step works on
apply        the order of transforms on the module, in place
blocks       found or named: what is recomputed, compiled and gathered one at a time
program      a step whose loss is (sum, count), divided by the count of all micro-batches and ranks
chain        the parts of a module in the order in which they run: what a pipeline splits
pipeline     a step of such a chain under a schedule
hf_layers    the layers of a Hugging Face decoder as parts of a chain
tp_plan      the tp plan that a Hugging Face decoder publishes, read; tp applies it
cp           its attention over ranks, by the name under which the library calls it
dataset      samples of any map-style dataset, distributed over ranks and micro-batches
loop_loader  the user's own loader, so that each data-parallel rank gets its part
buffers      running statistics and the like, kept equal on all data-parallel ranks
unsupported  what cannot be done with a module, refused before anything is changed
"""
