// SPDX-License-Identifier: Apache-2.0
//
// The eviction policy `hazard` as a type of Python. Compiled against CPython's stable ABI of 3.11: the
// functions that it calls are those of the interpreter that loaded the library.
#ifndef FLEXKV_HAZARD_POLICY_H
#define FLEXKV_HAZARD_POLICY_H

#include "flexkv/mover.h"

#ifdef __cplusplus
extern "C" {
#endif

struct _object;

// The type, which implements flexkv.eviction.EvictionPolicy: a new reference to a PyTypeObject, or null
// with an exception set. Called with the GIL held, from Python through ctypes.PyDLL.
FKV_API struct _object* fkv_hazard_policy_type(void);

#ifdef __cplusplus
}
#endif

#endif  // FLEXKV_HAZARD_POLICY_H
