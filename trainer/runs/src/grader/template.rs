//! `{{ namespace.variable }}` in the texts of graders.

use super::Sample;

const OPEN: &str = "{{";
const CLOSE: &str = "}}";
const KNOWN: [&str; 4] = ["item.id", "item.prompt", "item.answer", "sample.output_text"];

/// Refuses a text with variables that do not exist.
pub(super) fn check(text: &str) -> Result<(), String> {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(OPEN) {
        let (name, after) = after
            .split_once(CLOSE)
            .ok_or_else(|| format!("`{OPEN}` without `{CLOSE}`"))?;
        let name = name.trim();
        if !KNOWN.contains(&name) {
            return Err(format!("`{name}` is not known; there are {}", KNOWN.join(", ")));
        }
        rest = after;
    }
    Ok(())
}

/// The text with the values of its variables. What is put in is not read for variables again.
pub(super) fn fill(text: &str, sample: &Sample<'_>) -> String {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(OPEN) {
        let Some((name, after)) = after.split_once(CLOSE) else {
            break;
        };
        filled.push_str(before);
        filled.push_str(match name.trim() {
            "item.id" => sample.id,
            "item.prompt" => sample.prompt,
            "item.answer" => sample.answer,
            "sample.output_text" => sample.text,
            _ => "",
        });
        rest = after;
    }
    filled.push_str(rest);
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_is_replaced_once() {
        let sample = Sample {
            rollout: uuid::Uuid::nil(),
            id: "7",
            prompt: "p",
            answer: "{{ item.id }}",
            text: "t",
        };
        let filled = fill(
            "{{item.id}} {{ item.prompt }}: {{ item.answer }} {{sample.output_text}}!",
            &sample,
        );
        assert_eq!(filled, "7 p: {{ item.id }} t!");
        for name in KNOWN {
            let text = format!("{OPEN} {name} {CLOSE}");
            assert_eq!(check(&text), Ok(()));
            assert!(!fill(&text, &sample).is_empty());
        }
        assert!(check("a {{ item.text }}").is_err());
    }
}
