"""User modules: any `nn.Module`, or a Hugging Face model outside our families, on the same mesh and step.

fit             trains a module on a dataset with a loss
own_loop        `prepare`: a user's own training loop on any number of ranks
build_training  from a module to program, optimizer and loss scale
build_program   the order of transforms on the module, in place
blocks          found or named: the modules that are recomputed, compiled and gathered one at a time
module_program  a step whose loss is (sum, count), divided by the count over all micro-batches and ranks
chain           the parts of a module in the order in which they run: what a pipeline splits into stages
chain_program   a step of such a chain under a pipeline schedule
hf_layers       the layers of a Hugging Face decoder as parts of a chain
reading_group   one rank reads for the tp, cp and pp ranks that compute on the same samples
sample_reads    a few samples, read to choose which ranks read
tp_plan         reads the tp plan that a Hugging Face decoder publishes
tp              shards the decoder by that plan
cp              shards its attention over ranks through the library's attention interface
dataset         samples of any map-style dataset, assigned to ranks and micro-batches
loop_loader     the user's own loader, distributed over data-parallel ranks
buffers         running statistics and the like, kept equal on all data-parallel ranks
unsupported     what cannot be done with a module, refused before anything is changed
"""
