"""Readers of records in every format: one file per format, each a `RecordSource`.

`open_source` recognises the format of a path. Packages of other projects (pyarrow, lmdb, h5py, fsspec) are
optional and imported behind `extras.package`. Opening a dataset executes nothing that is in it: there is no
pickle, and the values of LMDB and HDF5 files are bytes and arrays.
"""
