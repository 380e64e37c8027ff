// SPDX-License-Identifier: Apache-2.0
//
// The index of a tier as a type of Python. Compiled against CPython's stable ABI of 3.11: the functions
// that it calls are those of the interpreter that loaded the library.
#ifndef FLEXKV_BLOCK_INDEX_H
#define FLEXKV_BLOCK_INDEX_H

#include "flexkv/mover.h"

#ifdef __cplusplus
extern "C" {
#endif

struct _object;

// The type, which is flexkv_kernels.block_index.BlockIndex: a new reference to a PyTypeObject, or null with an
// exception set. `states` is a sequence of the members of flexkv.index.block_index.BlockState, in their order. Called
// once, with the GIL held, from Python through ctypes.PyDLL.
FKV_API struct _object* fkv_block_index_type(struct _object* states);

// Bytes of the shared memory of an index of so many slots.
FKV_API uint64_t fkv_block_index_bytes(uint64_t slots);

// The type behind flexkv_kernels.block_index.IndexReader, in the same way.
FKV_API struct _object* fkv_index_reader_type(void);

// The type flexkv_kernels.block_index.SlotIndex, in the same way.
FKV_API struct _object* fkv_slot_index_type(void);

// Bytes of the memory of a set of so many keys.
FKV_API uint64_t fkv_key_set_bytes(uint64_t keys);

// The type flexkv_kernels.block_index.KeySet, in the same way.
FKV_API struct _object* fkv_key_set_type(void);

// The type that makes flexkv.types.packed_keys.PackedKeys, in the same way.
FKV_API struct _object* fkv_packed_keys_type(void);

#ifdef __cplusplus
}
#endif

#endif  // FLEXKV_BLOCK_INDEX_H
