// Executes PTX as ptx_program.py has decoded it: blocks of warps of 32 lanes, on the memory of this process.
//
// Lanes of a warp that part ways go on from the lowest program counter, until they meet again. Every access is checked
// for bounds, alignment, and in shared memory for bytes that nobody has written. Every byte knows who wrote it last, and
// when, as that warp counts: whoever touches it later must come after that by barriers, or by atomic operations that
// release and acquire, or it is a race (vector clocks: Fidge 1988, Mattern 1989). A load that is in a race gets garbage:
// that it is used shows in what the kernel leaves. What is read first and written then is so in the other order of warps.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using s8 = int8_t; using s16 = int16_t; using s32 = int32_t; using s64 = int64_t;
using f16 = _Float16; using f32 = float; using f64 = double; using pred = bool;
struct bf16 { u16 bits; operator f32() const { return std::bit_cast<f32>(u32(bits) << 16); } };
template <class T> struct Two { T low, high; };
using bf16x2 = Two<bf16>; using preds = Two<pred>; using two_u16 = Two<u16>; using two_u32 = Two<u32>;

// ---------------------------------------------------------------- values in registers, which have 64 bits each

template <class T> T value(u64 bits) {
  if constexpr (std::is_same_v<T, pred>) return bits & 1;
  else if constexpr (std::is_integral_v<T>) return T(bits);
  else { T made; std::memcpy(&made, &bits, sizeof made); return made; }
}
inline u16 bits(f16 x) { return x != x ? 0x7fff : std::bit_cast<u16>(x); }
inline u32 bits(f32 x) { return x != x ? 0x7fffffff : std::bit_cast<u32>(x); }  // the only NaN that arithmetic makes
inline u64 bits(f64 x) { return std::bit_cast<u64>(x); }
inline u64 bits(pred x) { return x; }
template <std::integral T> u64 bits(T x) { return std::make_unsigned_t<T>(x); }

template <class T> T quotient(T a, T b) {  // by 0: all ones, as devices do
  if (b == 0) return T(-1);
  if constexpr (std::is_signed_v<T>) if (b == -1) return T(0 - u64(a));
  return a / b;
}
template <class T> T remainder(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>) if (b == -1) return 0;
  return a % b;
}
template <class T> T smaller(T a, T b) {
  if (a != a || b != b) return a != a ? b : a;
  return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T> T field(T a, u32 from, u32 length) {  // 9.7.1.19: bits beyond the highest are the field's own sign
  if (length == 0 || (from > 31 && std::is_unsigned_v<T>)) return 0;
  u32 sign = std::is_signed_v<T> && (u32(a) >> std::min(from + length - 1, 31u) & 1) ? ~0u : 0;
  u32 found = from > 31 ? sign : u32(a) >> from | (from ? sign << (32 - from) : 0);
  return length > 31 ? found : (found & ((1u << length) - 1)) | sign << length;
}
inline u32 bytes_of(u64 given, u32 selected) {  // 9.7.9.7
  u32 found = 0;
  for (int i = 0; i < 4; i++) {
    u32 which = selected >> 4 * i, byte = given >> 8 * (which & 7) & 255;
    found |= (which & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return found;
}
inline s64 to_s64(f64 x) {
  if (x != x) return INT64_MIN;
  return x >= 0x1p63 ? INT64_MAX : x <= -0x1p63 ? INT64_MIN : s64(x);
}

// ---------------------------------------------------------------- a launch

enum Control : s32 { LD = 1000, ST, ATOM, BRA, RET, BAR, WARP_BAR, SHFL, REDUX, STMATRIX, LDMATRIX, PARAM, SPECIAL };
enum Combines : s32 { ADD, MIN, MAX, AND, OR, XOR, EXCH };
enum Order : s64 { FORWARD, BACKWARD, MIXED };
constexpr u32 ALL = ~0u;
constexpr size_t AT_ONCE = 16;  // blocks, in a mixed order
// What is no fault by itself: NOTES of ptx_machine.py.
constexpr const char *SAME = "the same again from another ", *UNUSED = "an unused load of what is stored by another ";

struct Instruction {  // DTYPE of ptx_program.py
  s32 op, guard, negated, line, kind, is_signed, bytes, count, shared, target, orders, to[4], from[5];
  s64 offset;
};
struct Range { u64 low, high, writable; };
struct Launch {  // words of 8 bytes, from ptx_machine.py
  const Instruction *code;
  s64 registers, constants;
  const u64 *constant, *params;
  s64 warps, grid, shared;
  const Range *ranges;
  s64 range_count, order, seed, most;
  char *said;
  s64 room;
};

using Clock = std::vector<u32>;
struct Last { s32 unit = -1; u32 at = 0; s32 lane = 0; u32 since = 0; };  // who wrote a byte last: a warp of the grid
struct Warp {
  std::vector<u64> registers;
  u32 at[32] = {}, alive = ALL, since = 1;  // since: barriers of this warp, which order its lanes
  bool waiting = false;
};
struct Block {
  s32 number;
  std::vector<Warp> warps;
  std::vector<u8> shared, written;
  std::vector<Last> last;
};

class Machine {
 public:
  explicit Machine(const Launch &launch) : launch(launch), random(u32(launch.seed)), units(launch.grid * launch.warps) {
    clocks.assign(units, Clock(units, 0));
    for (s64 i = 0; i < units; i++) clocks[i][i] = 1;
    for (s64 i = 0; i < launch.range_count; i++) last.emplace_back(launch.ranges[i].high - launch.ranges[i].low);
  }

  void run() {
    std::vector<s32> order(launch.grid);
    for (s32 i = 0; i < launch.grid; i++) order[i] = i;
    if (launch.order == BACKWARD) std::reverse(order.begin(), order.end());
    if (launch.order == MIXED) std::shuffle(order.begin(), order.end(), random);
    std::vector<Block> live;
    for (size_t next = 0; next < order.size() || !live.empty();) {
      size_t room = launch.order == MIXED ? AT_ONCE : 1;
      while (live.size() < room && next < order.size()) live.push_back(begun(order[next++]));
      Block &chosen = live[random() % live.size()];
      if (!turn(chosen)) std::swap(chosen, live.back()), live.pop_back();
      else if (launch.order == MIXED) step(chosen, random() % launch.warps, 1 + random() % 200);
      else for (s64 i = 0, end = launch.warps - 1; i <= end; i++) {
        step(chosen, launch.order == BACKWARD ? end - i : i, launch.most);
      }
    }
  }

  void tell() {  // a line of the PTX, how often, and what
    std::string text;
    for (auto &[what, times] : faults) {
      text += std::to_string(what.first) + " " + std::to_string(times) + " " + what.second + "\n";
    }
    std::snprintf(launch.said, launch.room, "%s", text.c_str());
  }

 private:
  const Launch &launch;
  std::mt19937 random;
  s64 units;                            // warps of the grid
  std::vector<Clock> clocks;            // of each: how far of each other it comes after
  std::map<u64, Clock> released;        // by an atomic operation, at its address
  std::vector<std::vector<Last>> last;  // of each range, by byte
  std::map<std::pair<s32, std::string>, s64> faults;
  s64 executed = 0;
  // What is executed:
  Block *block;
  Warp *warp;
  s64 in_block;
  const Instruction *now;
  u32 active;
  bool raced;  // a load of a lane

  void fault(std::string what) { faults[{now->line, what}]++; }

  // ---------------------------------------------------------------- blocks

  Block begun(s32 number) {
    std::vector<u8> bytes(launch.shared);
    Block made{number, std::vector<Warp>(launch.warps), bytes, bytes, std::vector<Last>(bytes.size())};
    for (Warp &each : made.warps) {
      each.registers.assign(launch.registers * 32, 0xa5a5a5a5a5a5a5a5);
      for (s64 i = 0; i < launch.constants; i++) each.registers.insert(each.registers.end(), 32, launch.constant[i]);
    }
    return made;
  }

  // Opens a barrier at which all warps wait; tells whether any goes on.
  bool turn(Block &of) {
    bool any = false, runs = false;
    for (Warp &each : of.warps) any |= each.alive != 0, runs |= each.alive && !each.waiting;
    if (executed > launch.most) return faults[{0, "stopped after too many instructions"}]++, false;
    if (!any || runs) return any;
    Clock joined(units, 0), *own = &clocks[of.number * launch.warps];
    for (s64 i = 0; i < launch.warps; i++) for (s64 k = 0; k < units; k++) joined[k] = std::max(joined[k], own[i][k]);
    for (s64 i = 0; i < launch.warps; i++) {
      own[i] = joined, own[i][of.number * launch.warps + i]++;
      of.warps[i].waiting = false, of.warps[i].since++;
    }
    return true;
  }

  // ---------------------------------------------------------------- warps

  // Runs a warp until it waits or ends, or for so many instructions.
  void step(Block &of, s64 number, s64 most) {
    block = &of, warp = &of.warps[number], in_block = number;
    while (most > 0 && warp->alive && !warp->waiting) {
      u32 lowest = ALL, here = 0;
      for (int l = 0; l < 32; l++) if (warp->alive >> l & 1) lowest = std::min(lowest, warp->at[l]);
      for (int l = 0; l < 32; l++) here |= u32(warp->alive >> l & 1 && warp->at[l] == lowest) << l;
      do {  // straight on, until lanes part, or may meet others
        now = &launch.code[lowest++], active = here & guarded();
        executed++, most--;
        if (now->op == BRA || now->op == RET) break;
        if (active) execute();
      } while (here == warp->alive && !warp->waiting && most > 0);
      u32 gone = now->op == BRA ? active : 0;
      for (int l = 0; l < 32; l++) if (here >> l & 1) warp->at[l] = gone >> l & 1 ? now->target : lowest;
      if (now->op == RET) warp->alive &= ~active;
    }
  }

  u64 *lanes(s32 number) { return &warp->registers[s64(number) * 32]; }
  void set(int place, int lane, u64 bits) { if (now->to[place] >= 0) lanes(now->to[place])[lane] = bits; }
  template <class F, class... More> void each_lane(F f, More... more) {
    for (int l = 0; l < 32; l++) if (active >> l & 1) f(l, more...);
  }

  u32 guarded() {
    if (now->guard < 0) return ALL;
    u32 found = 0;
    for (int l = 0; l < 32; l++) found |= u32(lanes(now->guard)[l] & 1) << l;
    return now->negated ? ~found : found;
  }

  template <class T, class... Given, class F> void compute(F f) {
    each_lane([&]<size_t... I>(int l, std::index_sequence<I...>) {
      T made = f(value<Given>(lanes(now->from[I])[l])...);
      if constexpr (requires { made.high; }) set(0, l, bits(made.low)), set(1, l, bits(made.high));
      else set(0, l, bits(made));
    }, std::index_sequence_for<Given...>{});
  }

  void execute() {
    switch (now->op) {
#include "instructions.inc"
      case LD: load(); break;
      case ST: store(); break;
      case ATOM: atomic(); break;
      case BAR: together("a barrier"), warp->waiting = true; break;
      case WARP_BAR: together("a warp's barrier"), warp->since++; break;
      case SHFL: shuffle(); break;
      case REDUX: reduce(); break;
      case STMATRIX: case LDMATRIX: matrices(); break;
      case PARAM: each_lane([&](int l) { set(0, l, extended(launch.params[now->kind])); }); break;
      case SPECIAL: each_lane([&](int l) {
        set(0, l, (s64[]){in_block * 32 + l, block->number, launch.grid, launch.warps * 32, l}[now->kind]);
      });
    }
  }

  u64 extended(u64 bits) {
    int unused = 64 - 8 * now->bytes;
    return now->is_signed ? u64(s64(bits << unused) >> unused) : bits << unused >> unused;
  }

  // What all lanes must do together: those that are elsewhere would be waited for.
  void together(std::string what) { if (active != warp->alive) fault(what + " that some lanes do not reach"); }

  void shuffle() {  // 9.7.9.6
    together("a shuffle");
    u64 given[32];
    std::copy_n(lanes(now->from[0]), 32, given);
    each_lane([&](int l) {
      int by = lanes(now->from[1])[l] & 31;
      if (u32(lanes(now->from[2])[l]) != 31) fault("a shuffle within parts of a warp");
      set(0, l, given[now->kind ? by : l ^ by]);
    });
  }

  void reduce() {
    together("a reduction");
    s32 found = 0;
    u32 first = active & -active;
    each_lane([&](int l) {
      s32 given = lanes(now->from[0])[l];
      found = first >> l & 1 ? given : combined(found, given);
    });
    each_lane([&](int l) { set(0, l, u32(found)); });
  }

  template <class T> T combined(T a, T b) {
    switch (now->kind) {
      case ADD: return T(u64(a) + u64(b));
      case MIN: return std::min(a, b);
      case MAX: return std::max(a, b);
      case AND: return a & b;
      case OR: return a | b;
      case XOR: return a ^ b;
      default: return b;
    }
  }

  // ---------------------------------------------------------------- memory

  // Returns where an access finds its bytes, and notes it; nullptr where there is nothing.
  u8 *reached(int lane, u64 address, int size, const void *written) {
    if (address % size) fault("a misaligned access");
    if (now->shared) {
      if (address + size > u64(launch.shared)) return fault("an access beyond shared memory"), nullptr;
      u8 *known = &block->written[address];
      if (written) std::fill_n(known, size, 1);
      else if (std::find(known, known + size, 0) != known + size) fault("a load of what nobody has written");
      return note(lane, &block->shared[address], &block->last[address], size, static_cast<const u8 *>(written));
    }
    const Range *end = launch.ranges + launch.range_count;
    const Range *found = std::upper_bound(launch.ranges, end, address, [](u64 a, const Range &r) { return a < r.high; });
    if (found == end || address < found->low || address + size > found->high) {
      return fault(written ? "a store out of bounds" : "a load out of bounds"), nullptr;
    }
    if (written && !found->writable) fault("a store to what is not written");
    Last *marks = &last[found - launch.ranges][address - found->low];
    return note(lane, reinterpret_cast<u8 *>(address), marks, size, static_cast<const u8 *>(written));
  }

  u8 *note(int lane, u8 *memory, Last *marks, int size, const u8 *written) {
    s32 unit = block->number * launch.warps + in_block;
    const Clock &own = clocks[unit];
    bool atomic = now->op == ATOM;
    for (int i = 0; i < size; i++) {
      Last &before = marks[i];
      bool same = written && !atomic && memory[i] == written[i], ordered = atomic && before.lane < 0;
      const char *who = before.unit < 0 || ordered ? nullptr
                      : before.unit == unit ? (before.lane != lane && before.since == warp->since && !same ? "lane" : nullptr)
                      : own[before.unit] >= before.at ? nullptr
                      : before.unit / launch.warps == block->number ? "warp" : "block";
      if (who) fault(std::string(same ? SAME : written ? "a race with another " : UNUSED) + who), raced |= !written;
      if (written) before = {unit, own[unit], atomic ? -1 : lane, warp->since};
    }
    return memory;
  }

  u64 address(int lane) {
    u64 sum = lanes(now->from[0])[lane] + u64(now->offset);
    return now->shared ? u32(sum) : sum;
  }

  void load() {
    each_lane([&](int l) {
      raced = false;
      const u8 *memory = reached(l, address(l), now->bytes * now->count, nullptr);
      for (int i = 0; memory && i < now->count; i++) {
        u64 found = 0;
        std::memcpy(&found, memory + i * now->bytes, now->bytes);
        set(i, l, extended(raced ? 0xdeadbeefdeadbeef : found));
      }
    });
  }

  void store() {
    each_lane([&](int l) {
      u8 given[32];
      for (int i = 0; i < now->count; i++) std::memcpy(given + i * now->bytes, &lanes(now->from[1 + i])[l], now->bytes);
      int size = now->bytes * now->count;
      if (u8 *memory = reached(l, address(l), size, given)) std::memcpy(memory, given, size);
    });
  }

  void atomic() {
    each_lane([&](int l) {
      u64 at = address(l), before = 0, given = extended(lanes(now->from[1])[l]);
      u8 *memory = reached(l, at, now->bytes, &given);
      if (!memory) return;
      std::memcpy(&before, memory, now->bytes);
      u64 after = now->is_signed ? combined<s64>(extended(before), given) : combined<u64>(before, given);
      std::memcpy(memory, &after, now->bytes);
      set(0, l, before);
      if (!now->orders) return;
      s64 unit = block->number * launch.warps + in_block;
      Clock &own = clocks[unit], &kept = released[at];  // acquires, and releases
      kept.resize(units);
      for (s64 k = 0; k < units; k++) own[k] = kept[k] = std::max(own[k], kept[k]);
      own[unit]++;
    });
  }

  // Matrices of 8 rows of 16 bytes: lanes 8k to 8k + 7 have the addresses of the rows of matrix k, and lane l has
  // elements 2 (l % 4) and one more of row l / 4 (9.7.14.5.15, 9.7.14.5.16), or where .trans, of column l / 4.
  void matrices() {
    together("a move of matrices");
    for (int k = 0; k < now->count; k++) {
      bool stores = now->op == STMATRIX, there = true;
      u16 tile[8][8];
      auto element = [&](int lane, int half) -> u16 & {
        int across = 2 * (lane % 4) + half, along = lane / 4;
        return now->kind ? tile[across][along] : tile[along][across];
      };
      for (int lane = 0; lane < 32 && stores; lane++)
        for (int half = 0; half < 2; half++) element(lane, half) = lanes(now->from[1 + k])[lane] >> 16 * half;
      for (int row = 0; row < 8; row++) {
        u8 *memory = reached(8 * k + row, address(8 * k + row), 16, stores ? tile[row] : nullptr);
        there &= memory != nullptr;
        if (memory && stores) std::memcpy(memory, tile[row], 16);
        if (memory && !stores) std::memcpy(tile[row], memory, 16);
      }
      for (int lane = 0; lane < 32 && there && !stores; lane++)
        set(k, lane, u32(element(lane, 0)) | u32(element(lane, 1)) << 16);
    }
  }
};

extern "C" void execute(const Launch *launch) {
  Machine machine(*launch);
  machine.run();
  machine.tell();
}
extern "C" s64 size_of_instruction() { return sizeof(Instruction); }
