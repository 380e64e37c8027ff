// SPDX-License-Identifier: Apache-2.0
//
// The type `BlockIndex` for CPython, by the stable ABI. A call takes many blocks where it can: the
// step of an engine waits for it.
#include <algorithm>
#include <vector>

#include "../python/calls.hpp"
#include "flexkv/block_index.h"
#include "index.hpp"

namespace {

using flexkv::index::Block;
using flexkv::index::BlockTable;
using flexkv::index::Index;
using flexkv::index::Keys;
using flexkv::index::object_of;
using flexkv::index::State;
using flexkv::python::erased;
using flexkv::python::guarded;
using flexkv::python::Holder;
using flexkv::python::Items;
using flexkv::python::need_arguments;
using flexkv::python::none;
using flexkv::python::number;
using flexkv::python::own;
using flexkv::python::PythonError;
using flexkv::python::Reference;
using flexkv::python::share;

PyTypeObject* block_type = nullptr;

using Self = Holder<Index>;

Index& of(PyObject* self) { return Self::of(self); }

Reference block_or_none(Block* block) {
  return share(block == nullptr ? Py_None : object_of(block));
}

Block* block_of(PyObject* object) {
  if (Py_TYPE(object) != block_type) {
    PyErr_Format(PyExc_TypeError, "%R is no block", object);
    throw PythonError{};
  }
  return reinterpret_cast<Block*>(object);
}

// The blocks of a sequence of Python, which lives as long as this does.
class Blocks {
 public:
  explicit Blocks(PyObject* object) : items_(object) {
    blocks_.reserve(static_cast<std::size_t>(items_.size()));
    for (Py_ssize_t i = 0; i < items_.size(); ++i) {
      blocks_.push_back(block_of(items_[i]));
    }
  }

  const std::vector<Block*>& operator*() const noexcept { return blocks_; }

 private:
  Items items_;
  std::vector<Block*> blocks_;
};

std::vector<Py_ssize_t> numbers_of(PyObject* object) {
  const Items items(object);
  std::vector<Py_ssize_t> numbers(static_cast<std::size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    numbers[static_cast<std::size_t>(i)] = PyLong_AsSsize_t(items[i]);
  }
  if (PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return numbers;
}

// A list with a new reference to each.
Reference list_of(const std::vector<Block*>& blocks) {
  Reference list = own(PyList_New(static_cast<Py_ssize_t>(blocks.size())));
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), share(object_of(blocks[i])).release());
  }
  return list;
}

PyObject* watch(PyObject* self, PyObject*) {
  return guarded([&] {
    of(self).watch();
    return none();
  });
}

PyObject* lookup(PyObject* self, PyObject* keys) {
  return guarded([&] { return number(of(self).lookup(Keys(keys))); });
}

PyObject* present(PyObject* self, PyObject* keys) {
  return guarded([&] {
    const Keys all(keys);
    Reference list = own(PyList_New(all.size()));
    of(self).present(all, [&](Py_ssize_t i, bool has) {
      PyList_SetItem(list.get(), i, share(has ? Py_True : Py_False).release());
    });
    return list;
  });
}

PyObject* missing(PyObject* self, PyObject* keys) {
  return guarded([&] {
    const std::vector<Py_ssize_t> places = of(self).missing(Keys(keys));
    Reference list = own(PyList_New(static_cast<Py_ssize_t>(places.size())));
    for (std::size_t i = 0; i < places.size(); ++i) {
      PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), number(places[i]).release());
    }
    return list;
  });
}

PyObject* lease(PyObject* self, PyObject* keys) {
  return guarded([&] {
    const Keys all(keys);
    const std::vector<Block*> blocks = of(self).lease(all);
    return blocks.empty() && all.size() != 0 ? none() : list_of(blocks);
  });
}

PyObject* reserve(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    const bool is_first = args[1] == Py_None;
    const Reference pair = own(PyTuple_Pack(2, args[0], args[1]));
    const Keys keys(pair.get());
    const Py_hash_t hash = flexkv::index::hash_of(keys[0]);
    Block* const block = of(self).reserve(keys, 0, hash, is_first ? -1 : 1, nullptr, false);
    return block == nullptr ? none() : own(object_of(block));
  });
}

PyObject* reserve_all(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3, 1);
    const bool is_fetch = count == 4 && args[3] == Py_True;
    const Keys keys(args[0]);
    const std::vector<Py_ssize_t> positions = numbers_of(args[1]);
    std::vector<Py_ssize_t> prefix_starts = numbers_of(args[2]);
    std::sort(prefix_starts.begin(), prefix_starts.end());
    const auto is_first = [&](Py_ssize_t position) {
      return std::binary_search(prefix_starts.begin(), prefix_starts.end(), position);
    };
    std::vector<Py_hash_t> hashes;
    hashes.reserve(positions.size());
    for (const Py_ssize_t position : positions) {
      if (position < (is_first(position) ? 0 : 1) || position >= keys.size()) {
        PyErr_Format(PyExc_IndexError, "position %zd of %zd keys", position, keys.size());
        throw PythonError{};
      }
      hashes.push_back(flexkv::index::hash_of(keys[position]));
    }
    Reference made = own(PyList_New(0));
    Block* last = nullptr;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      if (i + BlockTable::kAtOnce < positions.size()) {
        of(self).prefetch(hashes[i + BlockTable::kAtOnce]);
      }
      const Py_ssize_t position = positions[i];
      const Py_ssize_t before = is_first(position) ? -1 : position - 1;
      Block* const block = of(self).reserve(keys, position, hashes[i], before, last, is_fetch);
      if (block != nullptr) {
        const Reference kept = own(object_of(block));
        if (PyList_Append(made.get(), kept.get()) != 0) {
          throw PythonError{};
        }
        last = block;
      }
    }
    return made;
  });
}

template <void (Index::*method)(const std::vector<Block*>&)>
PyObject* with_blocks(PyObject* self, PyObject* blocks) {
  return guarded([&] {
    const Blocks all(blocks);
    of(self).expel_stale(*all);
    (of(self).*method)(*all);
    return none();
  });
}

template <void (Index::*method)(Block*)>
PyObject* with_block(PyObject* self, PyObject* block) {
  return guarded([&] {
    of(self).expel_stale({block_of(block)});
    (of(self).*method)(block_of(block));
    return none();
  });
}

PyObject* pin(PyObject* self, PyObject* key) {
  return guarded([&] { return block_or_none(of(self).pin(key)); });
}

PyObject* holds(PyObject*, PyObject* block) {
  return guarded([&] {
    return share(block_of(block)->state_now() == State::dropped ? Py_False : Py_True);
  });
}

PyObject* lease_victim(PyObject* self, PyObject*) {
  return guarded([&] { return block_or_none(of(self).lease_victim()); });
}

PyObject* began(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    if (of(self).policy().follows_requests()) {
      const Keys keys(args[0]);
      of(self).policy().began(keys.sequence().get(), args[1], args[2]);
    }
    return none();
  });
}

PyObject* ended(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    of(self).policy().ended(args[0], args[1], args[2]);
    return none();
  });
}

PyObject* hit(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    of(self).hit(Keys(args[0]), args[1]);
    return none();
  });
}

PyObject* touch(PyObject* self, PyObject* keys) {
  return guarded([&] {
    of(self).touch(Keys(keys));
    return none();
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&] {
    of(self).clear();
    return none();
  });
}

PyObject* sweep(PyObject* self, PyObject* limit) {
  return guarded([&] {
    const std::size_t slots = PyLong_AsSize_t(limit);
    if (PyErr_Occurred() != nullptr) {
      throw PythonError{};
    }
    return number(static_cast<Py_ssize_t>(of(self).sweep(slots)));
  });
}

PyObject* settle(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    of(self).settle(*Blocks(args[0]), *Blocks(args[1]), *Blocks(args[2]));
    return none();
  });
}

PyObject* get_blocks(PyObject* self, void*) {
  return guarded([&] {
    std::vector<Block*> there;
    for (Block* const block : of(self).blocks()) {
      if (block != nullptr && !block->is_stale()) {
        there.push_back(block);
      }
    }
    return list_of(there);
  });
}

PyObject* get_has_room(PyObject* self, void*) {
  return guarded([&] { return share(of(self).has_room() ? Py_True : Py_False); });
}

PyObject* get_changes(PyObject* self, void*) { return share(of(self).changes()).release(); }

template <auto method>
PyObject* get_number(PyObject* self, void*) {
  return guarded([&] { return number(static_cast<Py_ssize_t>((of(self).*method)())); });
}

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(of(self).ready()); }

int contains(PyObject* self, PyObject* key) {
  try {
    return of(self).has(key) ? 1 : 0;
  } catch (const PythonError&) {
    return -1;
  }
}

constexpr long long kMostSlots = (1LL << 31) - 1;

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  long long slots = 0;
  PyObject* policy = nullptr;
  if (PyArg_ParseTuple(args, "LO", &slots, &policy) == 0) {
    return nullptr;
  }
  if (slots < 0 || slots > kMostSlots) {
    PyErr_Format(PyExc_ValueError, "%lld slots; allowed: 0 to %lld", slots, kMostSlots);
    return nullptr;
  }
  return guarded(
      [&] { return Self::make(type, static_cast<std::size_t>(slots), policy, block_type); });
}

PyMethodDef methods[] = {
    {"watch", watch, METH_NOARGS, nullptr},
    {"lookup", lookup, METH_O, nullptr},
    {"present", present, METH_O, nullptr},
    {"missing", missing, METH_O, nullptr},
    {"lease", lease, METH_O, nullptr},
    {"release", with_blocks<&Index::release>, METH_O, nullptr},
    {"release_unused", with_blocks<&Index::release_unused>, METH_O, nullptr},
    {"reserve", erased(reserve), METH_FASTCALL, nullptr},
    {"reserve_all", erased(reserve_all), METH_FASTCALL, nullptr},
    {"publish", with_blocks<&Index::publish>, METH_O, nullptr},
    {"abandon", with_blocks<&Index::abandon>, METH_O, nullptr},
    {"discard", with_blocks<&Index::discard>, METH_O, nullptr},
    {"drop", with_blocks<&Index::drop>, METH_O, nullptr},
    {"pin", pin, METH_O, nullptr},
    {"unpin", with_block<&Index::unpin>, METH_O, nullptr},
    {"holds", holds, METH_O, nullptr},
    {"lease_victim", lease_victim, METH_NOARGS, nullptr},
    {"retire", with_block<&Index::retire>, METH_O, nullptr},
    {"began", erased(began), METH_FASTCALL, nullptr},
    {"ended", erased(ended), METH_FASTCALL, nullptr},
    {"hit", erased(hit), METH_FASTCALL, nullptr},
    {"touch", touch, METH_O, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"sweep", sweep, METH_O, nullptr},
    {"settle", erased(settle), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"num_slots", get_number<&Index::slots>, nullptr, nullptr, nullptr},
    {"free_slots", get_number<&Index::free_slots>, nullptr, nullptr, nullptr},
    {"has_room", get_has_room, nullptr, nullptr, nullptr},
    {"stale_blocks", get_number<&Index::stale>, nullptr, nullptr, nullptr},
    {"evictions", get_number<&Index::evictions>, nullptr, nullptr, nullptr},
    {"pinned_blocks", get_number<&Index::pinned>, nullptr, nullptr, nullptr},
    {"changes", get_changes, nullptr, nullptr, nullptr},
    {"blocks", get_blocks, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Self::destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_sq_contains, reinterpret_cast<void*>(contains)},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.block_index.BlockIndex", sizeof(Self), 0,
                    Py_TPFLAGS_DEFAULT, slots};

}  // namespace

// A new reference to the type; null, with an exception set, if it cannot be made.
PyObject* fkv_block_index_type(PyObject* states) {
  return guarded([&] {
    block_type = flexkv::index::make_block_type(states);
    return own(PyType_FromSpec(&spec));
  });
}

// The same for the keys that calls of an index take.
PyObject* fkv_packed_keys_type(void) { return guarded(flexkv::index::make_packed_keys_type); }
