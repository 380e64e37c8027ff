// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string_view>
#include <vector>

#include "../eviction/python_type.hpp"
#include "policy.hpp"

namespace flexkv::index {

namespace {

class PythonPolicy : public Policy {
 public:
  PythonPolicy(PyObject* policy, BlockStore& store, const BlockTable& table)
      : store_(store),
        table_(table),
        began_(method(policy, "began")),
        ended_(method(policy, "ended")),
        inserted_(method(policy, "inserted")),
        hit_(method(policy, "hit")),
        touched_(method(policy, "touched")),
        held_(method(policy, "held")),
        released_(method(policy, "released")),
        evicted_(method(policy, "evicted")),
        victim_(method(policy, "victim")),
        clear_(method(policy, "clear")) {}

  void began(PyObject* keys, PyObject* context, PyObject* now) override {
    call(began_, keys, context, now);
  }

  void ended(PyObject* request_id, PyObject* output_tokens, PyObject* now) override {
    call(ended_, request_id, output_tokens, now);
  }

  void inserted(Block* block) override {
    const Reference parent =
        block->parent == kNoSlot ? share(Py_None) : bytes_of(store_.parent_key_of(block));
    call(inserted_, key_of(block).get(), parent.get(), block->fetched ? Py_True : Py_False);
  }

  void hit(Block* block, PyObject* context) override {
    call(hit_, key_of(block).get(), use_of(block).get(), context);
  }

  void touched(Block* block) override { call(touched_, key_of(block).get(), use_of(block).get()); }

  void held(Block* block) override { call(held_, key_of(block).get()); }

  void released(Block* block) override {
    call(released_, key_of(block).get(), use_of(block).get());
  }

  void evicted(Block* block) override { call(evicted_, key_of(block).get()); }

  Block* victim(Tenant) override {
    const Reference key = call(victim_);
    if (key.get() == Py_None) {
      return nullptr;
    }
    Block* const block = table_.find(view_of(key.get()));
    if (block == nullptr || !block->evictable()) {
      unknown(key.get());
    }
    return block;
  }

  bool follows_requests() const noexcept override { return true; }
  void forget_all() override { call(clear_); }
  bool may_be_torn() const noexcept override { return true; }

 protected:
  [[noreturn]] static void unknown(PyObject* key) {
    PyErr_SetObject(PyExc_KeyError, key);
    throw PythonError{};
  }

  [[noreturn]] void unknown(const Block* block) const { unknown(key_of(block).get()); }

  BlockStore& store_;

 private:
  static Reference bytes_of(KeyView key) {
    return own(PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size())));
  }

  Reference key_of(const Block* block) const { return bytes_of(store_.key_of(block)); }

  static Reference method(PyObject* policy, const char* name) {
    return own(PyObject_GetAttrString(policy, name));
  }

  static Reference use_of(const Block* block) { return own(PyLong_FromLongLong(block->used)); }

  template <typename... Arguments>
  static Reference call(const Reference& method, Arguments... arguments) {
    return own(PyObject_CallFunctionObjArgs(method.get(), arguments..., nullptr));
  }

  const BlockTable& table_;
  const Reference began_;
  const Reference ended_;
  const Reference inserted_;
  const Reference hit_;
  const Reference touched_;
  const Reference held_;
  const Reference released_;
  const Reference evicted_;
  const Reference victim_;
  const Reference clear_;
};

// The same for `hazard`, without a call of Python for each block: a step of an engine waits for it.
// What it keeps of a key is where the store has it, and the policy's number of each block is at hand.
class HazardPolicy final : public PythonPolicy {
 public:
  HazardPolicy(PyObject* policy, BlockStore& store, const BlockTable& table, const Portion* portion)
      : PythonPolicy(policy, store, table),
        portion_(portion),
        hazard_(policy, bytes_at),
        numbers_(store.size(), eviction::kNone) {}

  void inserted(Block* block) override {
    const Block* parent = store_.parent_of(block);
    if (parent != nullptr && portion_ != nullptr && !portion_->has(store_.slot_of(parent))) {
      parent = nullptr;  // another policy has it
    }
    const eviction::Key after = parent == nullptr ? eviction::Key() : key_of(parent);
    const std::uint32_t before = parent == nullptr ? eviction::kNone : number_of(parent);
    const std::uint32_t number = hazard_->inserted(
        key_of(block), parent == nullptr ? nullptr : &after, before, block->fetched);
    if (number == eviction::kNone) {
      PyErr_SetString(PyExc_ValueError, "the tier of the policy is full");
      throw PythonError{};
    }
    number_of(block) = number;
  }

  bool may_be_torn() const noexcept override { return false; }
  void hit(Block*, PyObject*) override {}
  void touched(Block*) override {}
  void set_room(std::size_t blocks) noexcept override {
    hazard_->set_room(static_cast<std::uint32_t>(blocks));
  }

  void held(Block* block) override { hazard_->held(known(block)); }
  void released(Block* block) override { hazard_->released(known(block)); }

  void evicted(Block* block) override {
    prefetch_parents(block);
    hazard_->evicted(known(block), key_of(block), store_.is_of_reset(block));
    number_of(block) = eviction::kNone;
  }

  Block* victim(Tenant) override {
    const auto* const key = static_cast<const StoredKey*>(hazard_->victim());
    if (key == nullptr) {
      return nullptr;
    }
    Block* const block = store_.block_of(key);
    if (!block->tabled || !block->evictable()) {
      unknown(block);
    }
    return block;
  }

 private:
  static std::string_view bytes_at(void* key) { return static_cast<const StoredKey*>(key)->view(); }

  eviction::Key key_of(const Block* block) const {
    const StoredKey& stored = store_.stored_key(block);
    return {stored.view(), const_cast<StoredKey*>(&stored)};
  }

  // Often the next that leave. Their memory is seldom in the processor's caches.
  void prefetch_parents(const Block* block) {
    const Block* const next = store_.parent_of(block);
    if (next == nullptr) {
      return;
    }
    if (const std::uint32_t number = number_of(next); number != eviction::kNone) {
      hazard_->prefetch_next(number);
    }
    const Block* const second = store_.parent_of(next);
    if (second == nullptr) {
      return;
    }
    if (const std::uint32_t number = number_of(second); number != eviction::kNone) {
      hazard_->prefetch_second(number);
    }
    if (second->parent != kNoSlot) {
      __builtin_prefetch(&numbers_[static_cast<std::size_t>(second->parent)]);
    }
  }

  std::uint32_t& number_of(const Block* block) noexcept {
    return numbers_[static_cast<std::size_t>(store_.slot_of(block))];
  }

  std::uint32_t known(const Block* block) {
    const std::uint32_t number = number_of(block);
    if (number == eviction::kNone) {
      unknown(block);
    }
    return number;
  }

  const Portion* portion_;
  eviction::HazardLoan hazard_;         // of the policy, which the base keeps alive
  std::vector<std::uint32_t> numbers_;  // by slot; kNone while the policy does not know the block
};

}  // namespace

std::unique_ptr<Policy> make_policy(PyObject* policy, BlockStore& store, const BlockTable& table,
                                    const Portion* portion) {
  if (eviction::is_hazard(policy)) {
    return std::make_unique<HazardPolicy>(policy, store, table, portion);
  }
  return std::make_unique<PythonPolicy>(policy, store, table);
}

}  // namespace flexkv::index
