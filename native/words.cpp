// Words of equal width, one after the other, the lowest bit first.
#include "bitstream.hpp"
#include "indices.hpp"

namespace thinwire {

void words_encode(Indices words, int bits, Bytes out) {
    require(bits >= 0 && bits < 32 && out.numel == words_nbytes(words.numel, bits),
            "out: its size does not fit the words");
    BitWriter writer(out.data, 0);
    const uint32_t mask = (uint32_t{1} << bits) - 1;
    for (size_t j = 0; j < words.numel; ++j) writer.put(static_cast<uint32_t>(words.data[j]) & mask, bits);
    writer.finish();
}

void words_decode(Payload payload, int bits, IndicesOut words) {
    require(bits >= 0 && bits < 32 && payload.numel == words_nbytes(words.numel, bits),
            "payload: its size does not fit the words");
    BitReader reader(payload.data, 0, payload.data + payload.numel);
    for (size_t j = 0; j < words.numel; ++j) words.data[j] = static_cast<int32_t>(reader.get(bits));
}

}  // namespace thinwire
