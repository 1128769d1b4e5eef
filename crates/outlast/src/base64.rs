//! Bytes as text, for the wire: RFC 4648 with padding.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let number = group.iter().fold(0u32, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..4 {
            let letter = char::from(ALPHABET[(number >> (18 - 6 * at) & 63) as usize]);
            text.push(if at <= group.len() { letter } else { '=' });
        }
    }
    text
}

/// None if it is not base64.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let letters = text.as_bytes();
    if !letters.len().is_multiple_of(4) {
        return None;
    }
    let mut bytes = Vec::with_capacity(letters.len() / 4 * 3);
    for (at, group) in letters.chunks(4).enumerate() {
        let is_last = (at + 1) * 4 == letters.len();
        let padding = group.iter().rev().take_while(|letter| **letter == b'=').count();
        if padding > 2 || (padding > 0 && !is_last) {
            return None;
        }
        let mut number = 0u32;
        for letter in &group[..4 - padding] {
            let value = ALPHABET.iter().position(|known| known == letter)?;
            number = number << 6 | u32::try_from(value).ok()?;
        }
        let number = number << (6 * padding);
        bytes.extend_from_slice(&number.to_be_bytes()[1..4 - padding]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_and_nonsense_does_not() {
        let table =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")];
        for (bytes, text) in table {
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()));
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
        for text in ["Z", "Zg=", "Zg==Zg==", "Z===", "Zm9*", "Zm9v\n", "=Zm9"] {
            assert_eq!(decode(text), None, "{text:?}");
        }
    }
}
