// SPDX-License-Identifier: Apache-2.0
//
// A policy for each tenant. Victims come from the tenant that has most for its share: a tenant below
// its share loses no block to one above it, and what a tenant does not use is lent.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../eviction/heap.hpp"
#include "../python/calls.hpp"
#include "policy.hpp"

namespace flexkv::index {

namespace {

using python::Items;

// What one tenant has, or all tenants without a share of their own.
struct Part {
  Tenant tenant;
  double share;  // slots
  Portion portion;
  std::unique_ptr<Policy> policy;
  std::size_t slots = 0;      // with a block in the table, or with a writer
  std::size_t blocks = 0;     // that the policy has
  std::size_t evictable = 0;  // of them

  bool is_above() const noexcept { return static_cast<double>(slots) > share; }
};

class Tenants final : public Policy {
 public:
  Tenants(PyObject* shares, BlockStore& store, const BlockTable& table)
      : store_(store),
        table_(table),
        owners_(store.size(), Portion::kNobody),
        evictable_(store.size()),
        order_(Before{this}) {
    const Items all(shares);
    if (all.size() < 1 || all.size() > Portion::kNobody) {
      PyErr_Format(PyExc_ValueError, "%zd tenants; allowed: 1 to %d", all.size(), Portion::kNobody);
      throw PythonError{};
    }
    parts_.reserve(static_cast<std::size_t>(all.size()));
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
      add(all[i]);
    }
    std::sort(by_tenant_.begin(), by_tenant_.end());
    for (std::size_t i = 1; i < by_tenant_.size(); ++i) {
      if (by_tenant_[i].first == by_tenant_[i - 1].first) {
        PyErr_Format(PyExc_ValueError, "two shares of tenant %u", by_tenant_[i].first);
        throw PythonError{};
      }
    }
  }

  // Each policy sees the part of the prompt that it has. That of the request's tenant sees the blocks
  // that nobody has, too.
  void began(PyObject* keys, PyObject* context, PyObject* now) override {
    const Number asking = number_of(tenant_in(context));
    const Keys all(keys);
    std::vector<Number> owners(static_cast<std::size_t>(all.size()), asking);
    bool is_alone = true;
    table_.find_each(all, [&](Py_ssize_t i, Block* block) {
      const Number owner = block == nullptr ? Portion::kNobody : owner_of(block);
      if (owner != Portion::kNobody && owner != asking) {
        owners[static_cast<std::size_t>(i)] = owner;
        is_alone = false;
      }
      return true;
    });
    if (is_alone) {
      parts_[asking].policy->began(keys, context, now);
      return;
    }
    std::vector<bool> has(parts_.size());
    for (const Number owner : owners) {
      has[owner] = true;
    }
    for (std::size_t number = 0; number < parts_.size(); ++number) {
      if (has[number]) {
        const Reference own = part_of(all, owners, static_cast<Number>(number));
        parts_[number].policy->began(own.get(), context, now);
      }
    }
  }

  void ended(PyObject* request_id, PyObject* output_tokens, PyObject* now) override {
    for (Part& part : parts_) {
      part.policy->ended(request_id, output_tokens, now);
    }
  }

  void inserted(Block* block) override {
    const Number number = number_of(store_.tenant_of(store_.slot_of(block)));
    Part& part = parts_[number];
    part.policy->inserted(block);  // what may raise comes first
    owner_of(block) = number;
    ++part.blocks;
    set_room(part);
  }

  void hit(Block* block, PyObject* context) override { policy_of(block).hit(block, context); }
  void touched(Block* block) override { policy_of(block).touched(block); }

  void held(Block* block) override {
    set_evictable(block, false);
    policy_of(block).held(block);
  }

  void released(Block* block) override {
    policy_of(block).released(block);
    set_evictable(block, true);
  }

  void evicted(Block* block) override {
    Part& part = parts_[known(block)];
    set_evictable(block, false);
    --part.blocks;
    owner_of(block) = Portion::kNobody;
    part.policy->evicted(block);
    set_room(part);
  }

  Block* victim(Tenant asking) override {
    Part* const own = asking == kUnknownTenant ? nullptr : &parts_[number_of(asking)];
    Part* chosen = &parts_[order_.top()];
    if (chosen->evictable == 0) {
      return nullptr;
    }
    if (own != nullptr && own != chosen) {
      // With the block that asks for a slot.
      const auto slots = static_cast<double>(own->slots + 1);
      const bool is_above = slots > own->share;
      const bool is_next = slots * chosen->share >= static_cast<double>(chosen->slots) * own->share;
      if (is_above && is_next && own->evictable > 0) {
        chosen = own;
      } else if (!chosen->is_above() && (is_above || above_ > 0)) {
        chosen = own->evictable > 0 ? own : nullptr;
      }
    } else if (own == nullptr && !chosen->is_above() && above_ > 0) {
      chosen = nullptr;
    }
    return chosen == nullptr ? nullptr : chosen->policy->victim(asking);
  }

  bool follows_requests() const noexcept override { return parts_.front().policy->follows_requests(); }

  void forget_all() override {
    std::fill(owners_.begin(), owners_.end(), Portion::kNobody);
    std::fill(evictable_.begin(), evictable_.end(), false);
    for (Part& part : parts_) {
      part.blocks = part.evictable = 0;
      moved(part);
      part.policy->forget_all();
    }
  }

  bool may_be_torn() const noexcept override { return parts_.front().policy->may_be_torn(); }

  bool counts_tenants() const noexcept override { return true; }
  void entered(const Block* block) noexcept override {
    slot_taken(store_.tenant_of(store_.slot_of(block)));
  }
  void left(const Block* block) noexcept override {
    slot_returned(store_.tenant_of(store_.slot_of(block)));
  }

  void slot_taken(Tenant tenant) noexcept override {
    if (tenant != kUnknownTenant) {
      count(parts_[number_of(tenant)], 1);
    }
  }

  void slot_returned(Tenant tenant) noexcept override {
    if (tenant != kUnknownTenant) {
      count(parts_[number_of(tenant)], -1);
    }
  }

  std::vector<std::pair<Tenant, std::size_t>> slots_of_tenants() const override {
    std::vector<std::pair<Tenant, std::size_t>> found;
    for (const Part& part : parts_) {
      found.emplace_back(part.tenant, part.slots);
    }
    return found;
  }

 private:
  using Number = Portion::Number;

  // Whether the first of two parts loses a block before the second: it has more for its share, and a
  // block that may leave.
  struct Before {
    const Tenants* tenants;

    bool operator()(std::uint32_t one, std::uint32_t other) const noexcept {
      const Part& a = tenants->parts_[one];
      const Part& b = tenants->parts_[other];
      if ((a.evictable > 0) != (b.evictable > 0)) {
        return a.evictable > 0;
      }
      return static_cast<double>(a.slots) * b.share > static_cast<double>(b.slots) * a.share;
    }
  };

  void add(PyObject* object) {
    const Items items(object);
    const auto number = static_cast<Number>(parts_.size());
    const unsigned long tenant = items.size() == 3 ? PyLong_AsUnsignedLong(items[0]) : 0;
    const double share = items.size() == 3 ? PyFloat_AsDouble(items[1]) : -1;
    if (PyErr_Occurred() == nullptr && (tenant >= kUnknownTenant || !(share >= 0))) {
      PyErr_SetString(PyExc_ValueError, "a tenant is its number, its slots and its policy");
    }
    if (PyErr_Occurred() != nullptr) {
      throw PythonError{};
    }
    parts_.push_back({static_cast<Tenant>(tenant), share, Portion(owners_, number), nullptr});
    Part& part = parts_.back();  // it stays where it is: there is room for all
    part.policy = items[2] == Py_None ? make_lru(store_, &part.portion)
                                      : make_policy(items[2], store_, table_, &part.portion);
    if (number > 0) {
      by_tenant_.emplace_back(part.tenant, number);
    }
    set_room(part);
    order_.push(number);
  }

  static Tenant tenant_in(PyObject* context) {
    const Reference tenant = own(PyObject_GetAttrString(context, "tenant"));
    const unsigned long number = PyLong_AsUnsignedLong(tenant.get());
    if (PyErr_Occurred() != nullptr) {
      throw PythonError{};
    }
    return static_cast<Tenant>(number);
  }

  // The number of a tenant's part.
  Number number_of(Tenant tenant) const noexcept {
    const auto found = std::lower_bound(
        by_tenant_.begin(), by_tenant_.end(), tenant,
        [](const std::pair<Tenant, Number>& each, Tenant wanted) { return each.first < wanted; });
    return found != by_tenant_.end() && found->first == tenant ? found->second : Number{0};
  }

  static Reference part_of(const Keys& keys, const std::vector<Number>& owners, Number number) {
    Reference list = own(PyList_New(0));
    for (Py_ssize_t i = 0; i < keys.size(); ++i) {
      if (owners[static_cast<std::size_t>(i)] == number &&
          PyList_Append(list.get(), keys.object(i).get()) != 0) {
        throw PythonError{};
      }
    }
    return list;
  }

  Number& owner_of(const Block* block) noexcept {
    return owners_[static_cast<std::size_t>(store_.slot_of(block))];
  }

  Number known(const Block* block) {
    const Number number = owner_of(block);
    if (number == Portion::kNobody) {
      PyErr_SetString(PyExc_KeyError, "the policy of no tenant has the block");
      throw PythonError{};
    }
    return number;
  }

  Policy& policy_of(const Block* block) { return *parts_[known(block)].policy; }

  void set_evictable(const Block* block, bool evictable) {
    Part& part = parts_[known(block)];
    const auto slot = static_cast<std::size_t>(store_.slot_of(block));
    if (evictable_[slot] != evictable) {
      evictable_[slot] = evictable;
      part.evictable += evictable ? 1 : ~std::size_t{0};
      if (part.evictable <= 1) {
        moved(part);
      }
    }
  }

  void count(Part& part, int change) noexcept {
    const bool was_above = part.is_above();
    part.slots += static_cast<std::size_t>(change);
    above_ += static_cast<std::size_t>(part.is_above()) - static_cast<std::size_t>(was_above);
    moved(part);
  }

  void moved(const Part& part) noexcept {
    order_.move(static_cast<std::uint32_t>(&part - parts_.data()));
  }

  // A tenant keeps as many blocks as it has, and may come to have its share.
  static void set_room(Part& part) noexcept {
    part.policy->set_room(std::max(part.blocks, static_cast<std::size_t>(part.share)));
  }

  BlockStore& store_;
  const BlockTable& table_;
  std::vector<Number> owners_;    // by slot: the part whose policy has the block
  std::vector<bool> evictable_;   // by slot: whether that policy may choose it
  std::vector<Part> parts_;       // the first has the tenants without a share of their own
  std::vector<std::pair<Tenant, Number>> by_tenant_;
  eviction::Heap<Before> order_;
  std::size_t above_ = 0;  // parts above their shares
};

}  // namespace

std::unique_ptr<Policy> make_tenants(PyObject* shares, BlockStore& store, const BlockTable& table) {
  return std::make_unique<Tenants>(shares, store, table);
}

}  // namespace flexkv::index
