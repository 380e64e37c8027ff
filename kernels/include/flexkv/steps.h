// SPDX-License-Identifier: Apache-2.0
//
// What an engine's steps do to its blocks, as types of Python. Compiled against CPython's stable ABI of
// 3.11: the functions that they call are those of the interpreter that loaded the library.
#ifndef FLEXKV_STEPS_H
#define FLEXKV_STEPS_H

#include "flexkv/mover.h"

#ifdef __cplusplus
extern "C" {
#endif

struct _object;

// The types, which implement flexkv.engine.scheduler.access_log.AccessLog and
// flexkv.engine.scheduler.full_blocks.FullBlocks: a new reference to a PyTypeObject, or null with an exception
// set. Called with the GIL held, from Python through ctypes.PyDLL.
FKV_API struct _object* fkv_block_uses_type(void);
FKV_API struct _object* fkv_fill_calendar_type(void);

// The function flexkv.engine.scheduler.tables.ExtendTables, in the same way.
FKV_API struct _object* fkv_extend_tables(void);

#ifdef __cplusplus
}
#endif

#endif  // FLEXKV_STEPS_H
