//! Expert ids: the experts to which a mixture-of-experts model routed each token, by layer.
//!
//! The trainer replays them, so that it computes with the same experts as the sampler.
//!
//! ```text
//!  0  8  SPTEXPRT
//!  8  4  format version, 1
//! 12  4  tokens
//! 16  4  position of the first token in the generation's full prompt and sampled tokens
//! 20  2  layers with experts
//! 22  2  experts per token and layer
//! 24  2  experts of a layer; every id is smaller
//! 26  6  zero
//! 32     ids, by token, then layer, then rank: one byte each up to 256 experts, else two
//! ```
//! Little-endian. The digest in the payload's reference is the checksum.

const MAGIC: &[u8; 8] = b"SPTEXPRT";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;

/// Why bytes are not valid expert ids.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not expert ids: {0}")]
pub struct Malformed(&'static str);

/// Expert ids of consecutive tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// Position of the first token in the generation's full prompt and sampled tokens.
    pub first: u32,
    /// Layers with experts.
    pub layers: u16,
    /// Experts per token and layer.
    pub per_layer: u16,
    /// Experts of a layer.
    pub experts: u16,
    /// By token, then layer, then rank.
    pub ids: Vec<u16>,
}

impl Experts {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len() / self.width().max(1)
    }

    /// The ids of one token, by layer and rank. `None` beyond the last token.
    pub fn of(&self, token: usize) -> Option<&[u16]> {
        self.ids.chunks_exact(self.width().max(1)).nth(token)
    }

    fn width(&self) -> usize {
        usize::from(self.layers) * usize::from(self.per_layer)
    }

    /// Refuses ids that do not fill whole tokens and ids that are out of range.
    fn check(&self) -> Result<(), Malformed> {
        if self.width() == 0 {
            return Err(Malformed("there is no layer or no expert per layer"));
        }
        if self.ids.is_empty() || !self.ids.len().is_multiple_of(self.width()) {
            return Err(Malformed("the ids do not fill whole tokens"));
        }
        if self.ids.iter().any(|id| *id >= self.experts) {
            return Err(Malformed("an id is not below the number of experts"));
        }
        Ok(())
    }

    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        self.check()?;
        let tokens = u32::try_from(self.tokens()).map_err(|_| Malformed("there are too many tokens"))?;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.ids.len() * 2);
        bytes.extend_from_slice(MAGIC);
        for number in [VERSION, tokens, self.first] {
            bytes.extend(number.to_le_bytes());
        }
        for number in [self.layers, self.per_layer, self.experts, 0, 0, 0] {
            bytes.extend(number.to_le_bytes());
        }
        for id in &self.ids {
            match u8::try_from(*id) {
                Ok(id) if self.experts <= 256 => bytes.push(id),
                _ => bytes.extend(id.to_le_bytes()),
            }
        }
        Ok(bytes)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (header, ids) = bytes.split_at_checked(HEADER_BYTES).ok_or(Malformed("too short"))?;
        if header[..8] != *MAGIC {
            return Err(Malformed("wrong magic bytes"));
        }
        let long = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        if long(8) != VERSION {
            return Err(Malformed("unknown format version"));
        }
        if header[26..] != [0; 6] {
            return Err(Malformed("a reserved field is not zero"));
        }
        let experts = short(24);
        let ids: Vec<u16> = if experts <= 256 {
            ids.iter().copied().map(u16::from).collect()
        } else {
            let (pairs, rest) = ids.as_chunks::<2>();
            if !rest.is_empty() {
                return Err(Malformed("the last id is incomplete"));
            }
            pairs.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
        };
        let read = Self {
            first: long(16),
            layers: short(20),
            per_layer: short(22),
            experts,
            ids,
        };
        read.check()?;
        if read.tokens() as u64 != u64::from(long(12)) {
            return Err(Malformed("the number of ids does not match the header"));
        }
        Ok(read)
    }
}
