// Canonical Huffman codes of at most 12 bits, from the frequencies of symbols or from the lengths of their codes.
#pragma once

#include <algorithm>
#include <array>

#include "kernels.hpp"

namespace thinwire {

constexpr int kMaxLength = 12;
using Lengths = std::array<uint8_t, 256>;

struct Code {
    uint16_t bits;  // the first bit is the lowest
    uint8_t length;
};

struct Node {
    uint64_t count;
    int parent;
};

// Huffman's tree by two queues: leaves in order of (count, symbol), and joined nodes, which are created in order of count. A
// leaf comes before a joined node of the same count. Returns the length of the longest code.
inline int build_lengths(const std::array<uint64_t, 256>& counts, Lengths& lengths) {
    std::vector<int> symbols;
    for (int s = 0; s < 256; ++s)
        if (counts[s]) symbols.push_back(s);
    lengths.fill(0);
    std::stable_sort(symbols.begin(), symbols.end(), [&](int a, int b) { return counts[a] < counts[b]; });
    const size_t num_leaves = symbols.size();
    std::vector<Node> nodes;
    for (int s : symbols) nodes.push_back({counts[s], -1});
    size_t leaf = 0, joined = num_leaves;
    auto take = [&] {
        const bool take_leaf = leaf < num_leaves && (joined >= nodes.size() || nodes[leaf].count <= nodes[joined].count);
        return take_leaf ? leaf++ : joined++;
    };
    for (size_t i = 1; i < num_leaves; ++i) {
        const size_t a = take(), b = take();
        nodes[a].parent = nodes[b].parent = static_cast<int>(nodes.size());
        nodes.push_back({nodes[a].count + nodes[b].count, -1});
    }
    int longest = num_leaves == 1;
    if (num_leaves == 1) lengths[symbols[0]] = 1;
    std::vector<int> depth(nodes.size(), 0);
    for (size_t i = nodes.size(); i-- > 0;) {
        if (nodes[i].parent >= 0) depth[i] = depth[nodes[i].parent] + 1;
        if (i < num_leaves && num_leaves > 1) {
            longest = std::max(longest, depth[i]);
            lengths[symbols[i]] = static_cast<uint8_t>(std::min(depth[i], 255));
        }
    }
    return longest;
}

// Halves the counts until no code exceeds the limit.
inline Lengths limited_lengths(std::array<uint64_t, 256> counts) {
    Lengths lengths;
    while (build_lengths(counts, lengths) > kMaxLength)
        for (uint64_t& count : counts) count = (count + 1) / 2;
    return lengths;
}

// Assigns codes in order of (length, symbol), each one more than the last. False if no prefix code has these lengths.
inline bool assign_codes(const Lengths& lengths, std::array<Code, 256>& codes) {
    uint32_t next = 0;
    for (int length = 1; length <= kMaxLength; ++length, next <<= 1)
        for (int s = 0; s < 256; ++s) {
            if (lengths[s] != length) continue;
            if (next >= 1u << length) return false;
            uint32_t reversed = 0;
            for (int i = 0; i < length; ++i) reversed |= (next >> i & 1) << (length - 1 - i);
            codes[s] = {static_cast<uint16_t>(reversed), static_cast<uint8_t>(length)};
            ++next;
        }
    return true;
}

}  // namespace thinwire
