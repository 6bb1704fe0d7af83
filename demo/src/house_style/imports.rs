//! The rule `imports`.

use super::scan::{Kind, Scan, edited, is_word_byte, without_visibility};

/// `use a::{b, c as d, self};` → `use a::b;`, `use a::c as d;`, `use a;`. In rustfmt's words:
/// `imports_granularity = "Item"`. The visibility and attributes of a line each are repeated. A
/// statement with comments or anything else unusual stays.
pub fn imports(text: &str) -> String {
    let scan = Scan::new(text);
    let mut edits = Vec::new();
    for range in scan.use_statements() {
        let line_start = text[..range.start].rfind('\n').map_or(0, |at| at + 1);
        let indent = &text[line_start..range.start];
        let statement = &text[range.clone()];
        let tree = without_visibility(statement);
        let visibility = &statement[..statement.len() - tree.len()];
        let Some(tree) = tree.strip_prefix("use ").and_then(|tree| tree.strip_suffix(';')) else {
            continue;
        };
        let mut items = Vec::new();
        if !tree.contains('{') || !scan.is_all_code(range.clone()) || flatten(tree, "", &mut items).is_none() {
            continue;
        }
        let Some(attributes) = attributes_above(&scan, line_start) else {
            continue;
        };
        let repeated = attributes.iter().map(|line| format!("{line}\n{indent}"));
        let repeated = repeated.collect::<String>();
        let uses = items.iter().map(|item| format!("{visibility}use {item};"));
        let uses = uses.collect::<Vec<_>>().join(&format!("\n{indent}{repeated}"));
        edits.push((range, uses));
    }
    edited(text, edits)
}

/// Appends the items of a tree, each with its whole path. `None`: something is unusual.
fn flatten(tree: &str, prefix: &str, items: &mut Vec<String>) -> Option<()> {
    let tree = tree.trim();
    let Some((head, list)) = tree.split_once('{') else {
        let (path, rename) = tree
            .split_once(" as ")
            .map_or((tree, String::new()), |(path, name)| (path, format!(" as {name}")));
        let path = match path {
            "self" => prefix.strip_suffix("::")?.to_owned(),
            _ => format!("{prefix}{path}"),
        };
        let is_usual = |byte| is_word_byte(byte) || b":*$# ".contains(&byte);
        let blanks = rename.matches(' ').count();
        let item = path + &rename;
        let fits = !item.is_empty() && item.bytes().all(is_usual) && item.matches(' ').count() == blanks;
        return fits.then(|| items.push(item));
    };
    if !(head.is_empty() || head.ends_with("::")) {
        return None;
    }
    let prefix = format!("{prefix}{head}");
    let before = items.len();
    let (mut depth, mut start) = (0usize, 0);
    let list = list.strip_suffix('}')?;
    for (at, c) in list.char_indices().chain([(list.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.checked_sub(1)?,
            ',' if depth == 0 => {
                let piece = &list[start..at];
                if !piece.trim().is_empty() {
                    flatten(piece, &prefix, items)?;
                }
                start = at + 1;
            }
            _ => {}
        }
    }
    (depth == 0 && items.len() > before).then_some(())
}

/// The attributes directly above a line, without their indentation. `None`: one spans several
/// lines, or documentation is there.
fn attributes_above<'a>(scan: &Scan<'a>, line_start: usize) -> Option<Vec<&'a str>> {
    let text = scan.text;
    let mut found = Vec::new();
    let mut end = line_start;
    while end > 0 {
        let start = text[..end - 1].rfind('\n').map_or(0, |at| at + 1);
        let line = text[start..end - 1].trim();
        let last = start + text[start..end - 1].trim_end().len();
        if line.starts_with("///") || line.ends_with("*/") {
            return None;
        }
        if line.is_empty() || scan.kind(last - 1) != Some(Kind::Attribute) {
            break;
        }
        let is_inner = line.starts_with("#!");
        if is_inner {
            break;
        }
        if !line.starts_with("#[") {
            return None;
        }
        found.insert(0, line);
        end = start;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_has_a_statement_of_its_own() {
        for (text, want) in [
            ("use a::{b, c as d, self};\n", "use a::b;\nuse a::c as d;\nuse a;\n"),
            (
                "    pub(crate) use a::{\n        b::{self as x, *},\n        r#c,\n    }; // d\n",
                "    pub(crate) use a::b as x;\n    pub(crate) use a::b::*;\n    pub(crate) use a::r#c; // d\n",
            ),
            ("use {a, ::b};", "use a;\nuse ::b;"),
            ("use $crate::{a, b as _};", "use $crate::a;\nuse $crate::b as _;"),
            (
                "#![x]\n#[cfg(y)]\n#[z]\npub use a::{b, c};\n",
                "#![x]\n#[cfg(y)]\n#[z]\npub use a::b;\n#[cfg(y)]\n#[z]\npub use a::c;\n",
            ),
            ("use a::{self};\n", "use a;\n"),
            ("// b\nuse ::a::{ä};\n", "// b\nuse ::a::ä;\n"),
        ] {
            assert_eq!(imports(text), want);
            assert_eq!(imports(want), want);
        }
    }

    #[test]
    fn unusual_statements_stay() {
        for text in [
            "use a::b;\n",
            "// use a::{b, c};\n",
            "/// use a::{b, c};\n",
            "let s = \"\nuse a::{b, c};\n\";\n",
            "use a::{\n    b, // c\n    d,\n};\n",
            "use a::{/* b */ c, d};\n",
            "use a::{$(b),*};\n",
            "use {self};\n",
            "use a::{};\n",
            "use a::{b};c::{d};\n",
            "use a::{b",
            "use a{b, c};\n",
            "use a::}{b;\n",
            "use a::{b}, c};\n",
            "#[cfg(\n    x\n)]\nuse a::{b, c};\n",
            "/// X.\nuse a::{b, c};\n",
            "#[cfg(x)] use a::{b, c};\n",
        ] {
            let want = match text {
                "use a::{b};c::{d};\n" => "use a::b;c::{d};\n",
                _ => text,
            };
            assert_eq!(imports(text), want);
        }
    }
}
