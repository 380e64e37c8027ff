// SPDX-License-Identifier: Apache-2.0
//
// Blocks as objects of Python: one block, and some blocks in a row. See Block and BlockRow in
// flexkv.index.block_index.
#pragma once

#include <vector>

#include "block.hpp"

namespace flexkv::index {

// Makes the types; blocks have one of these three objects as their `state`. Throws PythonError.
void make_block_types(PyObject* states);

// A new reference to what stands for a block: the same object as long as one is alive. Throws
// PythonError.
Reference handle_of(BlockStore& store, Block* block);

// The block has left, and its slot is given to another: what stands for it keeps its key. Does nothing
// if nothing stands for it.
void detach_handle(BlockStore& store, Block* block) noexcept;

// A new `BlockRow` of the object of Python that owns the store. Throws PythonError.
Reference make_blocks(PyObject* owner, BlockStore& store, const std::vector<Block*>& blocks);

// The blocks of a `BlockRow` or of what Python can iterate over, all of this store, without those whose
// slots were given to others since. Throws PythonError.
std::vector<Block*> blocks_of(BlockStore& store, PyObject* object);

// One block. Null if it has left, and its slot was given to another since. Throws PythonError.
Block* block_of(const BlockStore& store, PyObject* object);

}  // namespace flexkv::index
