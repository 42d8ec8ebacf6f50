"""Modules that are not ours: the same mesh, reducer and step around a forward that we did not write.

blocks     found or named: what is recomputed, compiled and gathered one at a time
apply      the order of transforms on the module, in place
chain      the parts of a module in the order in which they run: what a pipeline cuts
pipeline   a step of such a chain under a schedule
published  the tp plan of a Hugging Face decoder, read; tp applies it
cp         its attention over ranks, by the name under which the library calls it
replay     its layers as parts of a chain
program    a step whose loss is (sum, count), divided by the count of all micro-batches and ranks
buffers    running statistics and the like, kept alike on all data-parallel ranks
"""

from meshwright.parallel.foreign.apply import build_chain_program, build_module_program
from meshwright.parallel.foreign.chain import Chain
from meshwright.parallel.foreign.pipeline import ChainProgram
from meshwright.parallel.foreign.program import Loss, ModuleProgram

__all__ = ["Chain", "ChainProgram", "Loss", "ModuleProgram", "build_chain_program", "build_module_program"]
